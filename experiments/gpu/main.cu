#include "experiments/gpu/rounds.h"

int main(int argc, char** argv) { return xpyd::gpu::run(argc, argv); }
