// --ranks processes: an instance with several pipeline stages is a head (a worker's process) and one process per stage.
#pragma once

#include "base/options/options.h"
#include "base/status.h"
#include "disagg/processes/registry.h"
#include "disagg/processes/worker.h"
#include "server/build.h"

namespace xpyd::server {

class SignalThread;

// Checks whether ranks can be processes under these options. Errors name the option.
Status check_rank_processes(const Options& options, const Build& build);

// Returns what makes a worker a head, if its instance has several stages and --ranks is not `threads`; otherwise none.
// `registry`: announces the head's address under rank_group_name(); may be null.
std::optional<ranks::HeadOptions> head_options(const Options& options, const Build& build, const ClusterKey& key,
                                               Registry* registry);

// The registry's name for an instance whose stages are remote: --rank-group.
std::string rank_group_name(const Options& options);

// xpyd worker --rank N: runs a stage. Returns when it has ended.
Status serve_stage(const Options& options, const Build& build, const WorkerOptions& worker, SignalThread& signals);

}  // namespace xpyd::server
