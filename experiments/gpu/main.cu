#include "experiments/gpu/rounds.h"

int main(int argc, char** argv) { return xpyd::experiments::gpu::run(argc, argv); }
