# docker build -t xpyd . && docker run --rm --network host xpyd      then http://127.0.0.1:8000, on this machine alone
# Compiled in one stage and copied into another that holds what the binary is linked with. Its commands were run in a chroot
# (tools/check-dockerfile), not by docker.
FROM debian:13-slim AS build
WORKDIR /xpyd
COPY . .
RUN apt-get update && apt-get install -y --no-install-recommends make && make install DESTDIR=/installed PREFIX=/usr/local

FROM debian:13-slim
RUN apt-get update && apt-get install -y --no-install-recommends libboost-program-options1.83.0 libibverbs1 libzmq5 libssl3t64 && rm -rf /var/lib/apt/lists/*
COPY --from=build /installed/ /
# Nobody needs root: KV over shared memory is a memfd, models are read.
USER 65534:65534
ENTRYPOINT ["xpyd"]
CMD ["serve", "--topology", "1P1D"]
