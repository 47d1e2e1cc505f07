#!/usr/bin/env bash
# Makes or refreshes a virtual environment.
#   usage: make_venv.sh FOLDER INTERPRETER STAMP PIP_ARGUMENT...
# STAMP is a file inside FOLDER that is written last; its name says what was installed, so a changed list installs again.
set -euo pipefail

folder=$1 interpreter=$2 stamp=$3
shift 3

rm -f "$folder"/.installed-*
if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    "$interpreter" -m venv --clear "$folder"
fi
echo "Installing into $folder with $("$folder/bin/python" -V): this takes about a minute." >&2
"$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@"
touch "$stamp"
