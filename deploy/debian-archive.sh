# Sourced by scripts that ask Debian's archive for one release. The host's own sources stay as they are.

# Sets "archive" to the options of an apt-get that knows only RELEASE, and keeps its lists in FOLDER.
know_release() { # FOLDER TYPE RELEASE, where TYPE is deb or deb-src
    local mirror
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
    chmod 755 "$1"
    mkdir -p "$1/lists/partial"
    echo "$2 [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $3 main" >"$1/sources.list"
    archive=(-o Dir::Etc::sourcelist="$1/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$1/lists")
}
