#!/usr/bin/env bash
# Makes or refreshes a virtual environment.
#   usage: make_venv.sh FOLDER INTERPRETER STAMP PIP_ARGUMENT...
# STAMP is a file inside FOLDER that is written last; its name says what was installed, so a changed list installs again.
set -euo pipefail

folder=$1 interpreter=$2 stamp=$3
shift 3

if [ -L "$folder" ]; then # installing through it would make another checkout's environment import this one
    echo "$folder is a link to $(readlink -f "$folder"), the environment of another folder, and installing would change that one." \
        "Remove the link ('rm $folder') to get an environment here, or run that environment's programs without make." >&2
    exit 2
fi
rm -f "$folder"/.installed-*
if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    "$interpreter" -m venv --clear "$folder"
fi
echo "Installing into $folder with $("$folder/bin/python" -V): this takes about a minute." >&2
"$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@"
touch "$stamp"
