# docker build -t xpyd . && docker run --rm --network host xpyd      then http://127.0.0.1:8000, on this machine alone
# The first stage compiles. The second one holds the binary and the libraries that it is linked with. tools/check-dockerfile has
# run these commands in a chroot; docker itself has not run them.
FROM debian:13-slim AS build
WORKDIR /xpyd
COPY . .
RUN apt-get update && apt-get install -y --no-install-recommends make && make install DESTDIR=/installed PREFIX=/usr/local

FROM debian:13-slim
RUN apt-get update && apt-get install -y --no-install-recommends libboost-program-options1.83.0 libibverbs1 libzmq5 && rm -rf /var/lib/apt/lists/*
COPY --from=build /installed/ /
# xpyd does not need root: KV in shared memory uses memfds, and models are only read.
USER 65534:65534
ENTRYPOINT ["xpyd"]
CMD ["serve", "--topology", "1P1D"]
