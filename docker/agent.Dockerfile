# Node agent and library. Build from the repository's root:
#   docker build -f docker/agent.Dockerfile -t paceline/agent .
# For GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130, and run with --gpus all.
FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/paceline \
    && /opt/paceline/bin/pip install --no-cache-dir --no-deps --index-url "${TORCH_INDEX}" -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY agent agent
COPY backend backend
COPY dashboard dashboard
COPY migrations migrations
COPY examples examples
RUN /opt/paceline/bin/pip install --no-cache-dir -c constraints.txt .
# Rank 0 plans while no controller does. Compile the kernels as in control-plane.Dockerfile.
ENV NUMBA_CPU_NAME=generic
RUN /opt/paceline/bin/python -c "from paceline import policies; policies.warm_up()"

FROM python:3.11-slim-bookworm
COPY --from=build /opt/paceline /opt/paceline
RUN useradd --create-home --uid 10001 paceline && install -d -o 10001 /data
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CPU_NAME=generic
USER 10001
WORKDIR /data
VOLUME /data
# PACELINE_SERVER and PACELINE_TOKEN come from the environment; see compose.yaml.
ENTRYPOINT ["paceline"]
CMD ["agent", "--data", "/data"]
