// base/precompiled.h for the tests.

#include <nlohmann/json.hpp>

#include "base/precompiled.h"
#include "tests/catch.h"
