// What the nccl wire uses of NCCL: the few functions that have kept their signatures since 2.14,
// looked up in libnccl.so.2 when an instance asks for the wire. Nothing is linked, and no header of
// NCCL's is needed to build; tests give the wire functions of their own (tests/disagg/fake_nccl.h).
//
// Names and values are those of nccl.h, so that its documentation applies.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"
#include "disagg/net/fields.h"

namespace xpyd::disagg {

struct NcclUniqueId {
  char internal[128] = {};
};
XPYD_FIELDS(NcclUniqueId, internal)
using NcclComm = struct ncclComm*;

// ncclResult_t, of which these matter.
enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclInternalError = 3,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7,
};
constexpr int kNcclUint8 = 1;  // ncclDataType_t

// ncclConfig_t as of 2.14. Later members are the library's defaults: it looks at size and version.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;  // calls return kNcclInProgress instead of waiting for the peer
};
constexpr int kNcclOldest = 21800;  // the first version whose calls do not block when told so

struct NcclApi {
  int (*get_unique_id)(NcclUniqueId* id);
  int (*comm_init_rank_config)(NcclComm* comm, int n_ranks, NcclUniqueId id, int rank, NcclConfig* config);
  int (*comm_get_async_error)(NcclComm comm, int* result);
  int (*comm_abort)(NcclComm comm);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* data, size_t count, int type, int peer, NcclComm comm, void* stream);
  int (*recv)(void* data, size_t count, int type, int peer, NcclComm comm, void* stream);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(NcclComm comm);
  int version = 0;  // as 22703 for 2.27.3
};

// For the life of the process. Error `unavailable`: no such library, or one that is too old.
Result<NcclApi> load_nccl(const std::string& library);
Result<const NcclApi*> load_nccl();  // libnccl.so.2, once

// From 2.28 on, what a communicator that does not block has is given back by a thread of NCCL's own after ncclCommAbort
// has returned; nothing says when. A process that ends meanwhile takes CUDA away from it.
void abort_comm(const NcclApi& api, NcclComm comm);
// Until the threads that abort_comm() saw begin have ended, or for `seconds`.
void await_aborted(double seconds);

std::string nccl_error(const NcclApi& api, int result, NcclComm comm);

}  // namespace xpyd::disagg
