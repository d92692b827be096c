"""The denoising loop: canvas, schedule, predictor, samplers, trajectory."""
