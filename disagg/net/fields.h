// Structs <-> bytes, field by field: of control messages (disagg/control/codec_fields.h) and of what the ends of a wire
// tell each other. A struct that crosses has one function beside it, which reads as the format:
//
//   template <class A>
//   void fields(A& a, typename A::template Ref<Point> s) {
//     auto& [x, name] = s;
//     a.number("x", x, 0, 99);
//     a.text("name", name);
//   }
//
// The structured binding names all members, so that a new one does not compile until it is there. An archive writes,
// reads (each number, count and enumerator is then in its range, or the error names the field), or describes:
//   number(name, x, min, max)   bits(name, x): any value of its type   real(name, x, min, max): finite
//   flag(name, x)               choice(name, e, last): enumerator      bytes(name, x): an array, as it lies
//   text(name, x): UTF-8        numbers(name, v, max)                  list(name, v, max): of structs (or texts)
//   maybe(name, optional)       part(name, x): a struct
// What has no limit of its own is limited by its frame. Other archives are made of these: Self has what they add.
//
// Thread safety: plain functions and values.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/siphash.h"
#include "base/status.h"
#include "base/utf8.h"
#include "disagg/net/bytes.h"
#include "disagg/net/frames.h"

namespace xpyd::disagg {

template <class Self>
struct FieldWriter {
  template <class T>
  using Ref = const T&;

  ByteWriter& to;
  Self& self() { return static_cast<Self&>(*this); }

  template <class T>
  void number(const char*, T value, int64_t, int64_t) {
    to.number(value);
  }
  template <class T>
  void real(const char*, T value, double, double) {
    to.number(value);
  }
  template <class T>
  void bits(const char*, T value) {
    to.number(value);
  }
  void flag(const char*, bool value) { to.boolean(value); }
  template <class E>
  void choice(const char*, E value, E) {
    to.number(uint8_t(value));
  }
  template <class T>
  void bytes(const char*, const T& value) {
    to.raw({reinterpret_cast<const char*>(&value), sizeof value});
  }
  // An explanation may quote bytes from anywhere.
  void text(const char*, const std::string& value) { to.text(is_utf8(value) ? value : replace_invalid_utf8(value)); }
  template <class T>
  void numbers(const char*, const std::vector<T>& values, size_t = 0) {
    to.numbers(values);
  }
  template <class T>
  void list(const char*, const std::vector<T>& values, size_t max) {
    XPYD_CHECK(values.size() <= max);
    to.count(values.size());
    for (const T& value : values) {
      if constexpr (std::is_same_v<T, std::string>)
        text("", value);
      else
        fields(self(), value);
    }
  }
  template <class T>
  void maybe(const char*, const std::optional<T>& value) {
    to.boolean(value.has_value());
    if (value) fields(self(), *value);
  }
  template <class T>
  void part(const char*, const T& value) {
    fields(self(), value);
  }
};

template <class Self>
struct FieldReader {
  template <class T>
  using Ref = T&;

  ByteReader& from;
  Self& self() { return static_cast<Self&>(*this); }

  template <class T>
  void number(const char* name, T& value, int64_t min, int64_t max) {
    value = from.number<T>(name, T(min), T(max));
  }
  template <class T>
  void real(const char* name, T& value, double min, double max) {
    value = from.number<T>(name, T(min), T(max));
  }
  template <class T>
  void bits(const char* name, T& value) {
    value = from.number<T>(name);
  }
  void flag(const char* name, bool& value) { value = from.boolean(name); }
  template <class E>
  void choice(const char* name, E& value, E last) {
    value = E(from.number<uint8_t>(name, 0, uint8_t(last)));
  }
  template <class T>
  void bytes(const char* name, T& value) {
    const std::string_view raw = from.raw(name, sizeof value);
    std::memcpy(&value, raw.data(), raw.size());
  }
  void text(const char* name, std::string& value) { value = from.utf8(name, kMaxFramePayloadBytes); }
  template <class T>
  void numbers(const char* name, std::vector<T>& values, size_t max = kMaxFramePayloadBytes) {
    values = from.numbers<T>(name, max);
  }
  // One by one: an element in memory is larger than its bytes here may be.
  template <class T>
  void list(const char* name, std::vector<T>& values, size_t max) {
    size_t n = from.count(name, max, 1);
    for (size_t i = 0; i < n && !from.failed(); ++i) {
      values.emplace_back();
      if constexpr (std::is_same_v<T, std::string>)
        text(name, values.back());
      else
        fields(self(), values.back());
    }
  }
  template <class T>
  void maybe(const char* name, std::optional<T>& value) {
    if (from.boolean(name)) fields(self(), value.emplace());
  }
  template <class T>
  void part(const char*, T& value) {
    fields(self(), value);
  }
};

// Names, types and limits as text, which schemas are hashes of.
template <class Self>
struct FieldDescriber {
  template <class T>
  using Ref = T&;

  std::string out;
  Self& self() { return static_cast<Self&>(*this); }

  void add(const char* kind, const char* name, size_t bytes, double a = 0, double b = 0) {
    out += std::string(kind) + " " + name + " " + std::to_string(bytes) + " " + std::to_string(a) + " " +
           std::to_string(b) + "\n";
  }
  template <class T>
  void number(const char* name, T&, int64_t min, int64_t max) {
    add("number", name, sizeof(T), double(min), double(max));
  }
  template <class T>
  void real(const char* name, T&, double min, double max) {
    add("real", name, sizeof(T), min, max);
  }
  template <class T>
  void bits(const char* name, T&) {
    add(std::is_integral_v<T> ? "integer" : "float", name, sizeof(T));
  }
  void flag(const char* name, bool&) { add("flag", name, 1); }
  template <class E>
  void choice(const char* name, E&, E last) {
    add("choice", name, 1, double(last));
  }
  template <class T>
  void bytes(const char* name, T&) {
    add("bytes", name, sizeof(T));
  }
  void text(const char* name, std::string&) { add("text", name, 1); }
  template <class T>
  void numbers(const char* name, std::vector<T>&, size_t max = 0) {
    add("numbers", name, sizeof(T), double(max));
  }
  template <class T>
  void list(const char* name, std::vector<T>&, size_t max) {
    add("list", name, 0, double(max));
    T one{};
    if constexpr (!std::is_same_v<T, std::string>) fields(self(), one);
  }
  template <class T>
  void maybe(const char* name, std::optional<T>&) {
    add("maybe", name, 1);
    T one{};
    fields(self(), one);
  }
  template <class T>
  void part(const char* name, T& value) {
    add("part", name, 0);
    fields(self(), value);
  }
};

struct WriteFields : FieldWriter<WriteFields> {};
struct ReadFields : FieldReader<ReadFields> {};
struct DescribeFields : FieldDescriber<DescribeFields> {};

template <class T>
std::string to_bytes(const T& value) {
  ByteWriter writer;
  WriteFields archive{{writer}};
  fields(archive, value);
  return writer.take();
}

// Whatever the bytes are: a value whose fields are in their ranges, or an error that names one.
template <class T>
Result<T> from_bytes(std::string_view bytes) {
  ByteReader reader(bytes);
  ReadFields archive{{reader}};
  T value;
  fields(archive, value);
  if (Status status = reader.finish(); !status) return status.error();
  return value;
}

// Of the messages of a wire: both ends must have the same (NodeIdentity::schema).
template <class T>
uint64_t schema_of() {
  DescribeFields archive;
  T one{};
  fields(archive, one);
  return siphash({0, 0}, archive.out);
}

}  // namespace xpyd::disagg
