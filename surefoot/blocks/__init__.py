"""The parts a model is made of. Each is single-device, names its weights' axes, and knows nothing of meshes."""
