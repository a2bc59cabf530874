// base/precompiled.h of the tests.

#include "base/precompiled.h"
#include "tests/catch.h"
