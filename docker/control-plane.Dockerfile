# Control plane with dashboard. Build from the repository's root:
#   docker build -f docker/control-plane.Dockerfile -t paceline/control-plane .
FROM python:3.11-slim-bookworm AS build
# The control plane runs no tensors: the CPU build keeps CUDA's gigabytes out.
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
RUN /opt/paceline/bin/pip install --no-cache-dir -c constraints.txt ".[server]"
# Compile the kernels into the package's folder, which the runtime can only read. They are code for
# any processor of this architecture: code for the builder's own would not be used on another.
ENV NUMBA_CPU_NAME=generic
RUN /opt/paceline/bin/python -c "from paceline import policies; policies.warm_up()"

FROM python:3.11-slim-bookworm
COPY --from=build /opt/paceline /opt/paceline
RUN useradd --create-home --uid 10001 paceline && install -d -o 10001 /data
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CPU_NAME=generic
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
# The tokens, PACELINE_DATABASE and PACELINE_BUS come from the environment; see compose.yaml.
ENTRYPOINT ["paceline"]
CMD ["server", "--host", "0.0.0.0", "--port", "8000", "--data", "/data"]
