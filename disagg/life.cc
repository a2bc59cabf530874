#include "disagg/life.h"

#include <algorithm>
#include <cstdio>

namespace xpyd::disagg {

// Each mark ends a phase that the last mark before it began; one that is missing is as early as that.
Attribution attribute(const RequestLife& life) {
  Attribution a;
  double at = life.t;
  auto until = [&at](double mark, double& phase) {
    if (mark <= at) return;
    phase += mark - at;
    at = mark;
  };
  until(life.placed, a.schedule);
  until(std::min(life.fetched, life.started > 0 ? life.started : life.fetched), a.fetch);
  until(life.started, a.queue);
  until(life.prompt_done > 0 ? life.prompt_done : life.first, a.prefill);
  until(life.joined, a.transfer);
  until(std::max(life.first, life.second), a.wait);
  return a;
}

std::string attribution_header() {
  return "request,prompt,cached,schedule_s,queue_s,fetch_s,prefill_s,transfer_s,wait_and_decode_s,ttft_s,second_token_"
         "s,"
         "prefill,decode";
}

std::string attribution_row(const RequestLife& life) {
  const Attribution a = attribute(life);
  char row[320];
  std::snprintf(row, sizeof row, "%llu,%d,%d,%.6f,%.6f,%.6f,%.6f,%.6f,%.6f,%.6f,%.6f,",
                static_cast<unsigned long long>(life.request), life.prompt, life.cached, a.schedule, a.queue, a.fetch,
                a.prefill, a.transfer, a.wait, life.first > 0 ? life.first - life.t : 0,
                life.second > 0 ? life.second - life.t : 0);
  return row + life.prefill + "," + life.decode;
}

}  // namespace xpyd::disagg
