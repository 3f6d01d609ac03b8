#!/usr/bin/env bash
# Builds a release archive for x86-64 Linux in target/package: one binary with the bundled model inside, shell completions,
# man pages, the files of tools/deploy, the licences of all crates in the binary and an SBOM. SHA256SUMS is written to the same folder.
#
#   tools/package.sh [--cpu | --binary FILE]
#
#   --cpu     without CUDA kernels; otherwise those for PEGAINFER_CUDA_SM [default: 80,86,89,90a,100,110,120] are inside, and the
#             binary looks for the driver when it starts, so that it also runs without one
#   --binary  packs a binary that was built before, with kernels; it may need this machine's glibc
#
# A binary that is built here needs glibc 2.28 (Debian 10, RHEL 8, Ubuntu 20.04 and newer) and is linked by zig from two pinned wheels.
# With kernels for six kinds of GPU the binary has 45 MB and the archive 28 MB, after 12 min of processor time.
# tools/package-test tries the archive.
set -euo pipefail
cd "$(dirname "$0")/.."

cuda=required kind=cuda built=
case $* in
"") ;;
--cpu) cuda=off kind=cpu ;;
"--binary "?*) built=$2 ;;
*) echo "error: the arguments $* are neither --cpu nor --binary FILE" >&2 && exit 2 ;;
esac
started=$SECONDS
export PEGAINFER_CUDA=$cuda PEGAINFER_CUDA_SM=${PEGAINFER_CUDA_SM:-80,86,89,90a,100,110,120}
target=x86_64-unknown-linux-gnu

if [[ -z $built ]]; then
    tools=target/package-tools
    [[ -x $tools/bin/cargo-zigbuild ]] || python3 -m venv "$tools"
    "$tools/bin/pip" -q install --disable-pip-version-check ziglang==0.15.2 cargo-zigbuild==0.24.0
    PATH=$PWD/$tools/bin:$PATH cargo zigbuild --profile dist --locked -p pegainfer-server --target "$target.2.28"
    built=target/$target/dist/pegainfer
fi

version=$("$built" --version | cut -d' ' -f2)
name=pegainfer-$version-x86_64-linux-$kind
out=target/package
root=$out/$name
rm -rf "$root"
mkdir -p "$root"/{completions,deploy,licences,man}
install -m 755 "$built" "$root/pegainfer"
strip "$root/pegainfer"
for shell in bash zsh fish; do
    "$root/pegainfer" completions "$shell" >"$root/completions/pegainfer.$shell"
done
"$root/pegainfer" man "$root/man"
cp -r tools/deploy/{chart,grafana-dashboard.json,kubernetes.yaml,pegainfer.service,prometheus-alerts.yaml} "$root/deploy/"
cp LICENSE "$root/"
tools/third-party licences >"$root/licences/crates.txt"
cp models/qwen3-tiny/README.md "$root/licences/qwen3-tiny.md"
cp pegainfer-server/ui/vendor/marked.LICENSE.txt "$root/licences/marked.txt"
tools/third-party sbom >"$root/sbom.cdx.json"

# The same commit gives the same archive.
date=$(git log -1 --format=%cI 2>/dev/null || echo 1970-01-01)
tar -C "$out" --sort=name --owner=0 --group=0 --numeric-owner --mtime="$date" -cf - "$name" | xz -T2 -6 >"$root.tar.xz"
(cd "$out" && sha256sum "$name.tar.xz" >SHA256SUMS)
mb() { echo "$(($(stat -c %s "$1") / 1000000)) MB"; }
echo "$root.tar.xz: $(mb "$root.tar.xz"), its binary $(mb "$root/pegainfer"), in $((SECONDS - started)) s"
