#include "disagg/transport/transport.h"

#include "base/table.h"
#include "disagg/transport/transports.h"

namespace xpyd::disagg {

std::span<const TransportRow> transports() { return kTransports; }

const TransportRow* find_transport(std::string_view name) { return find_row(kTransports, name); }

}  // namespace xpyd::disagg
