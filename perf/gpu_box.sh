#!/usr/bin/env bash
# Makes an offline GPU machine able to run the real Triton server: unpacks a bundle of it (tritonserver 2.51.0 with its
# Python backend and stub, tritonclient, numpy 1.26) and wheels of packages the machine lacks into one folder.
#   usage: source perf/gpu_box.sh BUNDLE.tar.xz WHEELS_FOLDER [SITE]     (sets PYTHONPATH; root, Python 3.12)
site_folder=${3:-/tmp/nereid-site}
if [ ! -e "$site_folder/.done" ] || ! python3 -c "import msgspec" 2>/dev/null; then
    mkdir -p "$site_folder"
    tar xJf "$1" -C "$site_folder"
    # into the environment itself: the 2.51 stub ignores PYTHONPATH
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir "$2"/*.whl || pip install -q --no-index --no-deps --no-cache-dir "$2"/*.whl
    # The 2.51 stub misreads strings under numpy 2, and the environment's numpy wins over PYTHONPATH inside the stub.
    packages=$(python3 -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    # The one that was there stays for a peer that wants it: PYTHONPATH=SITE/peer. So do SciPy and scikit-learn: they need
    # numpy 2, and where transformers finds them it imports them.
    if ! ls "$packages"/numpy-1.26.4.dist-info >/dev/null 2>&1; then
        mkdir -p "$site_folder"/peer
        for name in numpy scipy sklearn scikit_learn; do
            find "$packages" -maxdepth 1 \( -name "$name" -o -name "$name.libs" -o -name "$name-*.dist-info" \) \
                -exec mv -t "$site_folder"/peer/ {} +
        done
        cp -r "$site_folder"/numpy "$site_folder"/numpy.libs "$site_folder"/numpy-1.26.4.dist-info "$packages"/
    fi
    touch "$site_folder/.done"
fi
export PYTHONPATH="$site_folder${PYTHONPATH:+:$PYTHONPATH}"
