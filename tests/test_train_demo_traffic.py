"""What a compiled program sends, counted by hand in small pieces of HLO."""

import pytest

from train_demo.last_words import last_words
from train_demo.traffic import traffic

HLO = """HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%x, %y)
}

%inner (carry: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %hop = bf16[4,8]{1,0} collective-permute(%part), channel_id=1, source_target_pairs={{0,1},{1,0}}
}

%outer (carry: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %gathered = f32[16,8]{1,0} all-gather(%part), replica_groups=[2,4]<=[8], dimensions={0}
  %loop = (s32[], bf16[4,8]) while(%tuple), condition=%more, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

%more (carry: (s32[], bf16[4,8])) -> pred[] {
  ROOT %compare = pred[] compare(%i, %n), direction=LT
}

%little (x: f32[]) -> f32[] {
  ROOT %r = f32[] all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%much (x: f32[]) -> f32[] {
  ROOT %r = (f32[], /*index=1*/f32[100]{0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add
}

ENTRY %main (a: f32[]) -> f32[] {
  %loop = (s32[], bf16[4,8]) while(%tuple), condition=%more, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %either = f32[] conditional(%p, %a, %a), branch_computations={%little, %much}
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), replica_groups=mesh['x'=4,'y'=2], device_ids=([8]) {'y'}
  %done = f32[8]{0} all-gather-done(%start)
  ROOT %scattered = f32[2]{0} reduce-scatter(%b), replica_groups=mesh['x'=4,'y'=2] {'x':(1)2,'y'}, dimensions={0}
}
"""


def test_collectives_are_counted_with_the_trips_of_their_loops():
    found = traffic(HLO, 8)
    assert found.unknown_loops == 0
    assert found.kinds == {
        "all-gather": (5 + 1, 5 * 16 * 8 * 4 + 8 * 4, 5 * 16 * 8 * 4 * 3 / 4 + 8 * 4 / 2),
        "all-reduce": (1, 101 * 4, 2 * 101 * 4 * 7 / 8),  # the branch that sends most
        "collective-permute": (5 * 3, 15 * 4 * 8 * 2, 15 * 4 * 8 * 2),
        "reduce-scatter": (1, 4 * 2 * 4, 2 * 4 * 3),
    }


def test_a_loop_that_counts_from_0():
    told = ', backend_config={"known_trip_count":{"n":"5"}}'
    counter = """  %start = s32[] constant(0)
  %zero = s32[] copy(%start)
  %tuple = (s32[], /*index=1*/bf16[4,8]) tuple(%zero, %a)
  %loop = """
    condition = """  %n = s32[]{:T(128)} constant(5)
  %i = s32[] get-tuple-element(%carry), index=0
  ROOT %compare"""
    hlo = HLO.replace("ENTRY %main (a: f32[]) -> f32[] {\n  %loop = ", "ENTRY %main (a: f32[]) -> f32[] {\n" + counter)
    hlo = hlo.replace(told, "").replace("  ROOT %compare", condition)
    assert traffic(hlo, 8) == traffic(HLO, 8)
    assert traffic(hlo.replace("constant(0)", "constant(1)"), 8).unknown_loops == 1


def test_a_loop_of_unknown_length_is_named():
    found = traffic(HLO.replace(', backend_config={"known_trip_count":{"n":"3"}}', ""), 8)
    assert found.unknown_loops == 1
    assert found.kinds["collective-permute"].calls == 5


def test_groups_in_a_form_that_nobody_knows_are_no_guess():
    with pytest.raises(ValueError, match="unknown form"):
        traffic(HLO.replace("[2,4]<=[8]", "<all>"), 8)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", None),
        ("W1122 11:01:34.942885 5795 preemption_sync_manager.cc:147] Failed to retrieve preemption notice\n", None),
        (
            "F1122 11:01:27.769301 5726 client.h:80] Terminating process because\n"
            "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\n2\nThe tasks\n",
            "processes 1, 2 were lost: start all",
        ),
        (
            "F1122 11:01:34.942967 5795 client.h:80] Terminating. absl::Status: UNAVAILABLE: Failed to send RPC to "
            "coordination service.\n",
            "process 0, the coordinator, was lost",
        ),
        ("terminate called after throwing an instance of 'std::bad_alloc'\n", "(after throwing an instance of 'std::"),
        (
            "F1122 11:01 client.h:80] Terminating. absl::Status: INTERNAL: odd\n",
            "JAX ended this process (INTERNAL: odd)",
        ),
    ],
)
def test_the_last_words_of_a_process(log, line):
    assert last_words(log) is None if line is None else line in last_words(log)
