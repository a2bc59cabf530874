// Structs as bytes, field by field, for control messages (disagg/processes/codec_fields.h) and for what the two ends of
// a transport tell each other. Each struct has one list of its fields, which can be read as the format:
//
//   XPYD_FIELDS(Name, id, text)             if the types say everything (field(), below)
//
//   template <class A>
//   void fields(A& a, typename A::template Ref<Point> s) {
//     auto& [x, name, flag] = s;
//     a.number("x", x, 0, 99);
//     XPYD_EACH(a, name, flag);
//   }
//
// The structured binding names all members, so a new member does not compile until it is listed. An archive writes or
// reads. A reading archive checks the range of each enumerator, each count, and each number that has one, and its error
// names the field. The calls of an archive:
//   number(name, x, min, max)   number(name, x): any value of its type
//   flag(name, x)               choice(name, e, last): enumerator      bytes(name, x): an array, copied as it is
//   text(name, x): UTF-8        numbers(name, v, max)                  list(name, v, max): of structs (or texts)
//   maybe(name, optional)       part(name, x): a struct
// The frame's size limits all fields without a limit. Archives with more calls derive from these as Self.
//
// Thread safety: plain functions and values.
#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "base/utf8.h"
#include "disagg/net/bytes.h"
#include "disagg/net/frames.h"

namespace xpyd::disagg {

// The last enumerator of an enum whose values are 0 to it.
template <class E>
inline constexpr E kLast;

// Encodes a field by its type alone: numbers, flags, enums with a kLast, texts, structs, lists. A shared pointer needs
// an archive that has shared() for it.
template <class A, class T>
void field(A& a, const char* name, T& value) {
  using V = std::remove_const_t<T>;
  if constexpr (std::is_same_v<V, bool>)
    a.flag(name, value);
  else if constexpr (std::is_enum_v<V>)
    a.choice(name, value, kLast<V>);
  else if constexpr (std::is_arithmetic_v<V>)
    a.number(name, value);
  else if constexpr (std::is_same_v<V, std::string>)
    a.text(name, value);
  else if constexpr (std::is_array_v<V> || requires { std::tuple_size<V>::value; })
    a.bytes(name, value);
  else if constexpr (requires { value.has_value(); })
    a.maybe(name, value);
  else if constexpr (requires { value.use_count(); })
    a.shared(name, value);
  else if constexpr (requires { requires std::is_arithmetic_v<typename V::value_type>; })
    a.numbers(name, value);
  else if constexpr (requires { value.size(); })
    a.list(name, value);
  else
    a.part(name, value);
}

// The names of fields as a macro's arguments spell them, each with a zero behind it.
template <size_t n>
struct FieldNames {
  char text[n];
  constexpr FieldNames(const char (&spelled)[n]) {
    for (size_t i = 0; i < n; ++i) text[i] = spelled[i] == ',' || spelled[i] == ' ' ? '\0' : spelled[i];
  }
};
template <FieldNames names, class F, class... T>
void each_field(F f, T&... values) {
  const char* name = names.text;
  const auto one = [&](auto& value) {
    f(name, value);
    name += std::strlen(name) + std::strlen(", ");
  };
  (one(values), ...);
}
#define XPYD_EACH(a, ...)                   \
  ::xpyd::disagg::each_field<#__VA_ARGS__>( \
      [&](const char* name_, auto& value_) { ::xpyd::disagg::field(a, name_, value_); }, __VA_ARGS__)
#define XPYD_FIELDS(Struct, ...)                                           \
  template <class A>                                                       \
  void fields([[maybe_unused]] A& a, typename A::template Ref<Struct> s) { \
    (void)s;                                                               \
    __VA_OPT__(auto& [__VA_ARGS__] = s; XPYD_EACH(a, __VA_ARGS__);)        \
  }

template <class Self>
struct FieldWriter {
  template <class T>
  using Ref = const T&;

  ByteWriter& to;
  Self& self() { return static_cast<Self&>(*this); }

  template <class T, class... Range>
  void number(const char*, T value, Range...) {
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
  // An error text may quote any bytes.
  void text(const char*, const std::string& value) { to.text(is_utf8(value) ? value : replace_invalid_utf8(value)); }
  template <class T, class... Range>
  void numbers(const char*, const std::vector<T>& values, Range...) {
    to.numbers(values);
  }
  template <class T>
  void list(const char*, const std::vector<T>& values, size_t max = kMaxFramePayloadBytes) {
    XPYD_CHECK(values.size() <= max);
    to.count(values.size());
    for (const T& value : values) field(self(), "", value);
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
  void number(const char* name, T& value) {
    value = from.number<T>(name);
  }
  template <class T, class Min, class Max>
  void number(const char* name, T& value, Min min, Max max) {
    value = from.number<T>(name, T(min), T(max));
  }
  void flag(const char* name, bool& value) { value = from.boolean(name); }
  template <class E>
  void choice(const char* name, E& value, E last) {
    value = E(from.number<uint8_t>(name, 0, uint8_t(last)));
  }
  template <class T>
  void bytes(const char* name, T& value) {
    from.take_into(&value, sizeof value, name);
  }
  void text(const char* name, std::string& value) { value = from.utf8(name, kMaxFramePayloadBytes); }
  template <class T>
  void numbers(const char* name, std::vector<T>& values, size_t max = kMaxFramePayloadBytes) {
    values = from.numbers<T>(name, max);
  }
  // Elements are added one by one, because an element may be larger in memory than in these bytes.
  template <class T>
  void list(const char* name, std::vector<T>& values, size_t max = kMaxFramePayloadBytes) {
    size_t n = from.count(name, max, 1);
    for (size_t i = 0; i < n && !from.failed(); ++i) field(self(), name, values.emplace_back());
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

struct WriteFields : FieldWriter<WriteFields> {};
struct ReadFields : FieldReader<ReadFields> {};

template <class T>
std::string to_bytes(const T& value) {
  ByteWriter writer;
  WriteFields archive{{writer}};
  fields(archive, value);
  return writer.take();
}

// Decodes any bytes: returns a value whose fields are in range, or an error that names one.
template <class T>
Result<T> from_bytes(std::string_view bytes) {
  ByteReader reader(bytes);
  ReadFields archive{{reader}};
  T value;
  fields(archive, value);
  if (Status status = reader.finish(); !status) return status.error();
  return value;
}

}  // namespace xpyd::disagg
