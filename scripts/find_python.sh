#!/usr/bin/env bash
# Prints the path of a Python interpreter whose version is in the given list, in that order of preference.
#   usage: find_python.sh VARIABLE VERSION...        for example: find_python.sh PYTHON 3.12 3.13
# Looks at $VARIABLE (the user's own choice), at names on PATH, in pyenv's and uv's folders, and lets uv install one if
# uv is there. Every candidate is run, so that a shim which exists but starts nothing is passed over.
set -uo pipefail

variable=$1
shift
versions=("$@")

# True when $1 starts, is one of the versions in $2..., and can make virtual environments.
fits() {
    local candidate=$1
    shift
    "$candidate" -c 'import sys, ensurepip, venv; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:])' "$@" \
        >/dev/null 2>&1
}

accept() { # prints the interpreter's real path: a shim's answer can change with the folder it is called from
    "$1" -c 'import sys; print(sys.executable)'
    exit 0
}

chosen=${!variable:-}
if [ -n "$chosen" ]; then
    fits "$chosen" "${versions[@]}" && accept "$chosen"
    echo "$variable=$chosen does not start, lacks the venv module, or is none of Python ${versions[*]}." \
        "Set $variable to such an interpreter, or unset it to let one be found." >&2
    exit 2
fi

pyenv_root=$(pyenv root 2>/dev/null) || pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}

for version in "${versions[@]}"; do
    for name in "python$version" python3 python; do
        while IFS= read -r path; do
            fits "$path" "$version" && accept "$path"
        done < <(type -ap "$name")
    done
    for path in "$pyenv_root/versions/$version"*/bin/python; do
        [ -x "$path" ] && fits "$path" "$version" && accept "$path"
    done
    if command -v uv >/dev/null 2>&1; then
        path=$(uv python find "$version" 2>/dev/null) && fits "$path" "$version" && accept "$path"
    fi
done

if command -v uv >/dev/null 2>&1; then
    echo "No Python ${versions[*]} found; asking uv to install ${versions[0]}." >&2
    uv python install --quiet "${versions[0]}" >&2 && path=$(uv python find "${versions[0]}" 2>/dev/null) &&
        fits "$path" "${versions[0]}" && accept "$path"
fi

{
    echo "No usable Python found: this needs one of ${versions[*]}, with the venv module."
    echo "Install one (for example 'apt install python${versions[0]} python${versions[0]}-venv', 'pyenv install ${versions[0]}'"
    echo "or 'uv python install ${versions[0]}'), or set $variable to the path of an interpreter, and run this again."
} >&2
exit 2
