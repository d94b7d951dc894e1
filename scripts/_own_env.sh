# Sourced by scripts that test packages which pin versions that other adapters are past: an environment of its own for them.
# own_env FOLDER PACKAGE...: makes FOLDER once, with these packages alone over the project's environment; sets $own to its python.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

own_env() {
  local folder=$1 python=${PYTHON:-$root/.venv/bin/python} paths='import sysconfig; print(sysconfig.get_path("purelib"))'
  shift
  own=$folder/bin/python
  if [ ! -x "$own" ]; then
    "$python" -m venv "$folder"
    # torch, transformers and the rest come from the project's environment; what clashes is installed over them.
    "$python" -c "$paths" > "$("$own" -c "$paths")/project.pth"
    "$own" -m pip install -q --no-deps "$@"
  fi
}
