"""Built packages contain every file and no others, and their metadata is true."""

import email
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import hatchling.build
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("flax_mha", "train_demo")


def listed(*options):
    """The files of the repository or, if the tests run from an unpacked sdist, of the
    sdist.
    """
    if (ROOT / ".git").exists():
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z", *options]
        names = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
        return {name for name in names if name and (ROOT / name).exists()}
    made_by_tests = re.compile(
        r"(^|/)(__pycache__|\.\w+_cache|\.hypothesis)/|^PKG-INFO$"
    )
    return {name for name in files(ROOT) if not made_by_tests.search(name)}


def files(folder):
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = hatchling.build.build_sdist(str(folder))
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder, filter="data")
    return folder / name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that pip builds from the sdist, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sdist)
        name = hatchling.build.build_wheel(str(folder))
    with zipfile.ZipFile(folder / name) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.fixture(scope="module")
def metadata(wheel):
    (path,) = wheel.glob("*.dist-info/METADATA")
    return email.message_from_string(path.read_text())


def test_the_sdist_contains_every_file(sdist):
    new = listed("--others", "--exclude-standard")
    assert listed("--cached") <= files(sdist) <= listed("--cached") | new | {"PKG-INFO"}


def test_the_wheel_contains_only_the_package(sdist, wheel):
    built = {name for name in files(wheel) if ".dist-info/" not in name}
    assert "flax_mha/py.typed" in built
    assert built == {name for name in files(sdist) if name.startswith("flax_mha/")}


def test_the_wheel_runs_without_the_checkout(wheel, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import flax_mha; "
    code += "print(flax_mha.__file__, flax_mha.__version__)"
    run = [sys.executable, "-c", code]
    said = subprocess.run(
        run, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert said == [str(wheel / "flax_mha" / "__init__.py"), PROJECT["version"]]


@pytest.mark.core
def test_an_editable_install_adds_no_other_packages():
    """They would hide packages of the same name. `tests/test_typing.py` makes such an
    install.
    """
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(PACKAGES)


def test_the_description_has_no_relative_links(metadata):
    description = metadata.get_payload()
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text()))
    pictures = re.findall(r'src(?:set)?="([^"]*)"|!\[[^\]]*\]\(([^)]*)\)', description)
    pictures = [html or markdown for html, markdown in pictures]
    home = re.escape(PROJECT["urls"]["Homepage"])
    raw = home.replace("github", r"raw\.githubusercontent", 1)
    for link in links + pictures:  # what they point to exists
        assert link.startswith("https://")
        page = re.match(rf"(?:{home}/blob|{raw})/main/([^#]+)", link)
        assert page is None or (ROOT / page[1]).exists(), link
    assert pictures
    assert all(re.match(raw, picture) for picture in pictures)


def test_the_metadata(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "Apache-2.0"
    home = PROJECT["urls"]["Homepage"]
    assert all(
        url.split(", ")[1].startswith(home) for url in metadata.get_all("Project-URL")
    )
    needed = {
        Requirement(text).name
        for text in metadata.get_all("Requires-Dist")
        if "extra" not in text
    }
    assert needed == {"jax", "flax", "jaxtyping"}


@pytest.mark.core
def test_every_address_equals_pyproject():
    """If it changes there, this test lists the other places."""
    home = PROJECT["urls"]["Homepage"]
    wrong = []
    for name in listed("--cached"):
        text = (ROOT / name).read_text(errors="ignore")
        found = re.findall(
            r"(?:github|githubusercontent)\.com/[\w.-]+/flax[-_]mha\b", text
        )
        wrong += [
            (name, address)
            for address in found
            if address.partition("/")[2] != home.split("/", 3)[3]
        ]
    assert not wrong


@pytest.mark.core
def test_the_citation_equals_pyproject():
    citation = (ROOT / "CITATION.cff").read_text()
    stated = dict(re.findall(r"^([a-z-]+): \"?(.*?)\"?$", citation, re.MULTILINE))
    for name, key in {
        "version": "version",
        "license": "license",
        "description": "abstract",
    }.items():
        assert PROJECT[name] == stated[key]
    assert (
        stated["repository-code"]
        == PROJECT["urls"]["Repository"]
        == PROJECT["urls"]["Homepage"]
    )
    assert stated["keywords"] == f"[{', '.join(PROJECT['keywords'])}]"
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.core
def test_the_versions_in_the_readme():
    """They equal those in pyproject.toml, and the tests run with them."""
    text = (ROOT / "README.md").read_text()
    stated = {}
    bounds = {
        Requirement(text).name: str(Requirement(text).specifier)
        for text in PROJECT["dependencies"]
    }
    bounds["Python"] = PROJECT["requires-python"]
    running = {
        "Python": platform.python_version(),
        "jax": version("jax"),
        "flax": version("flax"),
    }
    for name in running:
        lowest, newest = stated[name] = re.search(
            rf"{name} ([\d.]+)\s+to\s+([\d.]+\d)", text
        ).groups()
        assert bounds[name] == f">={lowest}"
        parts = newest.count(".") + 1
        assert Version(lowest) <= Version(running[name])
        assert Version(running[name]).release[:parts] <= Version(newest).release
    minors = range(*(int(stated["Python"][i].split(".")[1]) + i for i in (0, 1)))
    classifiers = {
        text for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.", text)
    }
    assert classifiers == {
        f"Programming Language :: Python :: 3.{minor}" for minor in minors
    }
