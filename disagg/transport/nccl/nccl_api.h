// The functions of NCCL that the nccl transport uses. They have kept their signatures since 2.14 and are looked up in
// libnccl.so.2 when an instance asks for the transport. The build needs neither NCCL's library nor its headers. Tests
// give the transport their own functions (tests/disagg/fake_nccl.h).
//
// Names and values are those of nccl.h, so its documentation applies.
//
// Thread safety: any thread may call the functions here; NCCL decides for its own.
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

// The values of ncclResult_t that matter here.
enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclInternalError = 3,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7,
};
constexpr int kNcclUint8 = 1;  // ncclDataType_t

// ncclConfig_t as of 2.14. The library reads size and version, and takes its defaults for later members.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;  // calls return kNcclInProgress instead of waiting for the peer
};
constexpr int kNcclOldest = 21800;  // the first version whose calls obey blocking = 0

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
  int version = 0;  // 22703 is 2.27.3
};

// Loads the library for the rest of the process. Error `unavailable`: it is missing or too old.
Result<NcclApi> load_nccl(const std::string& library);
Result<const NcclApi*> load_nccl();  // libnccl.so.2, once

// Calls ncclCommAbort. From 2.28 on a thread of NCCL frees a non-blocking communicator after ncclCommAbort has
// returned, and NCCL does not tell when it is done. abort_comm() notes the threads that begin meanwhile.
void abort_comm(const NcclApi& api, NcclComm comm);
// Waits until these threads have ended, at most `seconds`. A process that ends before would take CUDA away from them.
void await_aborted(double seconds);

std::string nccl_error(const NcclApi& api, int result, NcclComm comm);

}  // namespace xpyd::disagg
