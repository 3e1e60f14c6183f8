"""Detection of the `Trainer` methods that a subclass overrides. They decide how a run counts, reads
and checks."""

_METHODS = {
    "has_own_loss": ("compute_loss",),
    "has_own_forward": ("compute_loss", "forward"),
    "has_own_backward": ("forward_backward_step",),
    "has_own_update": ("update", "read_result"),
    "has_own_pipeline": ("build_pipeline",),
}
"""Class attribute → methods. The attribute is true if a subclass overrides at least one of them."""


def declare_own_methods(cls: type, base: type) -> None:
    """Set the class attributes in `_METHODS` on a subclass of `base`. Raise `TypeError` if the
    class declares one of them with another value, for example if the method has a wrong name."""
    classes = cls.__mro__[: cls.__mro__.index(base)]
    for attribute, methods in _METHODS.items():
        has_own = any(method in each.__dict__ for each in classes for method in methods)
        declared = cls.__dict__.get(attribute, has_own)
        if declared is not has_own:
            subject = f"{cls.__qualname__}.{attribute} is {declared}"
            names = " or ".join(methods)
            if has_own:
                raise TypeError(
                    f"{subject}, but the class defines its own {names}; remove the attribute"
                )
            raise TypeError(
                f"{subject}, but the class defines no {names}; define it, or remove the attribute"
            )
        setattr(cls, attribute, has_own)
