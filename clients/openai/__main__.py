from clients.openai.cli import run

run()
