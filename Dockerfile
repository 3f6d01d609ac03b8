# Images of the server, from a clone of this repository:
#   docker build -t pegainfer .                          the CPU only, less than 80 MB
#   docker build -t pegainfer:cuda --target cuda .       CUDA kernels and cuBLASLt, less than 700 MB
# With `--build-arg PEGAINFER_CUDA_SM=90a` the kernels are compiled for one kind of GPU, which takes a sixth of the time.
#   docker run --rm -p 127.0.0.1:8000:8000 pegainfer
#   docker run --rm -p 127.0.0.1:8000:8000 --gpus all -v models:/models pegainfer:cuda serve --host 0.0.0.0 --model-path Qwen/Qwen3-4B
# The server runs as user 10001 and needs a writable /tmp (20 MB for the bundled model) and, for models of the hub, /models.
# What cargo downloads and compiles stays in caches of the builder (BuildKit, the default of Docker), so that a change of the
# source compiles only what depends on it. tools/deploy/check-images runs the commands where there is no container engine.

FROM rust:1.95.0-bookworm AS source
RUN apt-get update && apt-get install -y --no-install-recommends busybox-static python3-pip
WORKDIR /src
COPY . .

FROM source AS build-cpu
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,id=pegainfer-cpu,target=/src/target PEGAINFER_CUDA=off cargo build --profile dist --locked -p pegainfer-server && tools/deploy/image-files target/dist/pegainfer /image

FROM source AS build-cuda
ARG PEGAINFER_CUDA_SM=80,86,89,90a,100,110,120
RUN tools/setup-cuda.sh --cublas
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,id=pegainfer-cuda,target=/src/target PEGAINFER_CUDA=required cargo build --profile dist --locked -p pegainfer-server && tools/deploy/image-files target/dist/pegainfer /image .cuda/nvidia/cu13/lib/libcublasLt.so.13

# What both images share.
FROM scratch AS server
LABEL org.opencontainers.image.title=PegaInfer org.opencontainers.image.version=0.1.0 org.opencontainers.image.licenses=MIT
ENV HF_HOME=/models
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30m --start-interval=1s CMD ["/usr/local/bin/pegainfer", "health"]
ENTRYPOINT ["/usr/local/bin/pegainfer"]
CMD ["serve", "--host", "0.0.0.0"]

# The volume comes after the files: what is copied into it later would be lost.
FROM server AS cuda
COPY --from=build-cuda /image /
# Where NVIDIA's container toolkit puts the driver, and which parts of it.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu:/usr/lib64
VOLUME /models

FROM server AS cpu
COPY --from=build-cpu /image /
VOLUME /models
