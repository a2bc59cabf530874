// The rooms of the source tree have a namespace each, which sees the names of the rooms before it. base/ is xpyd
// itself. `make layers` keeps the files to the same order. Two rooms may use one name for two things.
#pragma once

namespace xpyd {

namespace allocator {}
namespace attention {
using namespace allocator;
}
namespace model {
using namespace attention;
}
namespace batch {
using namespace model;
}
namespace disagg {
using namespace batch;
}
namespace server {
using namespace disagg;
}
namespace experiments {
using namespace server;
}
namespace testing {
using namespace experiments;
}

}  // namespace xpyd
