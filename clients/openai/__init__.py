"""The OpenAI API over a Triton model repository: FastAPI in front, `tritonclient.grpc.aio` behind."""
