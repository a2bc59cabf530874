// Registry by etcd (v3, through its JSON gateway, so that plain HTTP is enough): one lease per
// process, kept alive at a third of its time; names are keys under it; watches are streams that
// begin with a snapshot, again whenever the stream was lost.
//
// After an outage the lease is asked for: where etcd still has it nothing happened, where it has
// expired (or etcd has lost its data) a new one is taken and every name announced again.
//
// It lives in this room because it speaks HTTP; the rooms below know the interface only.
#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "base/status.h"
#include "disagg/control/registry.h"

namespace xpyd::server {

inline constexpr double kRegistryTtlSeconds = 5;

// "etcd://HOST:PORT[/prefix]"; without a prefix "xpyd". `ttl_s`: how long a dead process's names
// stay, at least 2. Does not wait for etcd: state() says whether it is there.
Result<std::unique_ptr<Registry>> open_etcd(const std::string& url, double ttl_s, Clock& clock);

}  // namespace xpyd::server
