// msgpack-c with the settings that all users here share.
#pragma once

#define MSGPACK_NO_BOOST
#pragma GCC diagnostic push
// g++ mismatches its pairs of malloc() and free().
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#include <msgpack.hpp>
#pragma GCC diagnostic pop
