# The server as a plain user. The wheels bring the CUDA libraries of torch and the run-time compiler, so the base needs
# only the driver's hooks; without a GPU the same image runs on the CPU.
#
#   docker build -t snapmla .
#   docker run --gpus all --ipc host -p 127.0.0.1:8000:8000 -e SNAPMLA_API_KEY -v $HOME/.cache/huggingface:/cache/huggingface \
#       snapmla --model deepseek-ai/DeepSeek-V3.1 --dp 8
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml .constraints.txt README.md LICENSE ./
COPY kernels kernels
COPY models models
COPY engine engine
COPY server server
RUN python3 -m venv /opt/snapmla \
    && /opt/snapmla/bin/pip install --no-cache-dir -c .constraints.txt .
# every kernel is compiled here, which needs no GPU; a start then finds it by content
RUN SNAPMLA_CACHE=/opt/snapmla/cubin /opt/snapmla/bin/python -m kernels.cuda.build

FROM nvidia/cuda:13.0.2-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 snapmla \
    && mkdir -p /cache/huggingface \
    && chown -R snapmla /cache
COPY --from=build --chown=snapmla /opt/snapmla /opt/snapmla
ENV PATH=/opt/snapmla/bin:$PATH \
    SNAPMLA_CACHE=/opt/snapmla/cubin \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1
USER snapmla
WORKDIR /home/snapmla
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The container's own loopback would be unreachable; publish the port to an address you trust and set SNAPMLA_API_KEY.
ENTRYPOINT ["python", "-m", "engine.launch", "--host", "0.0.0.0", "--port", "8000"]
