"""Utterances in, packed rows out: manifests, audio, text, packing, and the order in which batches come."""
