#include "disagg/transport/transport.h"

#include "disagg/transport/wires.h"

namespace xpyd::disagg {

std::span<const TransportRow> transports() { return kTransports; }

const TransportRow* find_transport(std::string_view name) {
  for (const TransportRow& row : kTransports)
    if (name == row.name) return &row;
  return nullptr;
}

}  // namespace xpyd::disagg
