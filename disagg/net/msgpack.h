// msgpack-c, as it is included everywhere here.
#pragma once

#define MSGPACK_NO_BOOST
#pragma GCC diagnostic push
// g++ takes its pairs of malloc() and free() for others.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#include <msgpack.hpp>
#pragma GCC diagnostic pop
