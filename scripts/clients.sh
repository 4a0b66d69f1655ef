#!/bin/sh
# Makes environments with other people's clients and runs each against a live server; docs/clients.md says what they need.
#   scripts/clients.sh [FOLDER]     FOLDER keeps the environments (default: .clients, which git ignores)
set -eu
cd "$(dirname "$0")/.."
folder="${1:-.clients}"
python="${PYTHON:-python3}"

make_environment() {
  name="$1"; shift
  [ -x "$folder/$name/bin/python" ] && return
  "$python" -m venv "$folder/$name"
  if command -v uv > /dev/null; then uv pip install --quiet --python "$folder/$name/bin/python" "$@"; else "$folder/$name/bin/pip" install --quiet "$@"; fi ||
    echo "$name cannot be installed; its tests are skipped"
}

make_environment chat openai anthropic litellm mcp langchain-openai instructor 'outlines>=1'
make_environment lm_eval 'lm_eval[api]'
make_environment guidellm guidellm
make_environment openai_agents openai-agents
make_environment pydantic_ai 'pydantic-ai-slim[openai,anthropic]'
make_environment llama_index llama-index-llms-openai-like
make_environment smolagents 'smolagents[openai]'
make_environment ollama ollama
HEADRACE_CLIENT_ENVIRONMENTS="$(cd "$folder" && pwd)" exec "${HEADRACE_PYTHON:-python3}" -m pytest tests/e2e/clients -q -rs
