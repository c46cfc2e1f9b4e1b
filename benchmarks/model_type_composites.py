"""Names of model types: causal ones as Transformers names them, those that read images with a prefix."""

COMPOSITE = "image-text/"
"""Before a type's name: its model that reads images and text, where a causal model is another."""


def classes() -> dict[str, str]:
    """The class of each type: causal ones, then those that read images too, each class once."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    causal = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    return causal | {COMPOSITE + name: kind for name, kind in images if causal.get(name) != kind}


def plain(name: str) -> str:
    """As Transformers names the type."""
    return name.removeprefix(COMPOSITE)
