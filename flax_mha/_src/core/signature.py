"""`ConstructorSignature`: the signature of a class of `flax.nnx`."""

import inspect


class ConstructorSignature:
    """A descriptor for `__signature__`: the class gets its constructor's signature,
    which Flax's metaclass hides.

    Instances have no such attribute, so that `inspect.signature(module)` returns the
    signature of `__call__`.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        constructor = inspect.signature(owner.__init__)  # type: ignore[misc]
        _self, *parameters = constructor.parameters.values()
        return inspect.Signature(parameters)
