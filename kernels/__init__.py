"""Operations of the trainer. Keep this file a docstring: transformers probes a package of this name when it is imported."""
