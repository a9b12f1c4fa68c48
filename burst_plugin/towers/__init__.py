"""Encoders of images, frames and clips: shared out between ranks; features go where their tokens are."""
