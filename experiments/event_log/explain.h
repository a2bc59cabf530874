// Where the time of a request went, and how much KV it held: the text of `xpyd explain`.
//
// Thread safety: plain functions.
#pragma once

#include <string>

#include "disagg/request_trace.h"

namespace xpyd::disagg {

// KV memory that a request held, in byte seconds, with its cached prefix: on P from its first step until its KV was at
// D, on D from the grant until the end. It assumes that tokens come evenly between two marks. An instance that did both
// counts as D.
struct HeldKv {
  double prefill = 0, decode = 0;
};
HeldKv held_kv(const RequestTrace& trace);
// The CSV header, one request's CSV row (as Mooncake, FAST '25, figure 14), and the same as a sentence.
std::string attribution_header();
std::string attribution_row(const RequestTrace& trace);
std::string attribution_line(const RequestTrace& trace);

}  // namespace xpyd::disagg
