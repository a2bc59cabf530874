// The nccl wire over NCCL functions of the caller's, as tests give it.
#pragma once

#include "disagg/transport/nccl_api.h"
#include "disagg/transport/wires.h"

namespace xpyd {

MadeTransport make_nccl_transport(const TransportOptions& options, const NcclApi& api);

}  // namespace xpyd
