#include "server/supervisor.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace xpyd::server {

Supervisor::Orders Supervisor::look(std::span<const Presence> seen, double now) {
  constexpr double kTurn = 1;  // seconds: a longer one was this process asleep, and no child silent
  const double slept = std::max(0.0, now - looked_s_.value_or(now) - kTurn);
  looked_s_ = now;
  Orders orders;
  for (size_t i = 0; i < children_.size(); ++i) {
    Child& c = children_[i];
    if (c.life == Child::waiting && now >= c.start_at_s) orders.start.push_back(i);
    if (c.life != Child::running) continue;
    c.since_s = std::min(now, c.since_s + slept);
    if (std::exchange(c.seen, seen[i]) != seen[i]) c.since_s = now;
    c.had_channel |= c.seen >= Presence::connected;
    const double lasted = now - c.since_s;
    if (c.seen == Presence::serving) {
      if (lasted >= options_.longest_wait_s) c.ends = 0;
    } else if (lasted > (c.seen == Presence::stopped || (c.seen == Presence::absent && c.had_channel)
                             ? options_.silence_s
                             : options_.start_s)) {
      orders.kill.push_back(i);
      c.since_s = now;
    }
  }
  return orders;
}

void Supervisor::started(size_t child, double now) {
  children_[child] = {.life = Child::running, .ends = children_[child].ends, .since_s = now};
}

std::optional<double> Supervisor::ended(size_t child, bool retired, double now) {
  Child& c = children_[child];
  c.life = retired || !options_.restart ? Child::gone : Child::waiting;
  if (c.life == Child::gone) return {};
  const double wait = std::min(options_.longest_wait_s, std::ldexp(options_.first_wait_s, std::min(c.ends++, 60)));
  c.start_at_s = now + wait;
  return wait;
}

}  // namespace xpyd::server
