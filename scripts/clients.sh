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
  "$folder/$name/bin/pip" install --quiet "$@" || echo "$name cannot be installed; its tests are skipped"
}

make_environment chat openai anthropic litellm mcp langchain-openai instructor 'outlines>=1'
make_environment lm_eval 'lm_eval[api]'
make_environment guidellm guidellm
HEADRACE_CLIENT_ENVIRONMENTS="$(cd "$folder" && pwd)" exec "${HEADRACE_PYTHON:-python3}" -m pytest tests/e2e/clients -q -rs
