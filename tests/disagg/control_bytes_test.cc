#include <sys/stat.h>

#include <fstream>

#include "disagg/net/bytes.h"
#include "disagg/net/hello.h"
#include "tests/catch.h"

namespace xpyd::testing::control_bytes_test {
namespace {

std::string hex(const Sha256& digest) {
  std::string out;
  for (uint8_t byte : digest) {
    char text[3];
    std::snprintf(text, sizeof text, "%02x", byte);
    out += text;
  }
  return out;
}

TEST_CASE("what a ByteWriter writes a ByteReader reads", "[disagg][control]") {
  ByteWriter writer;
  writer.number(uint8_t{200});
  writer.number(int32_t{-5});
  writer.number(uint64_t{0x0102030405060708});
  writer.number(-0.25);
  writer.boolean(true);
  writer.text("KV é");
  writer.numbers(std::vector<int32_t>{1, -2, 3});
  writer.numbers(std::vector<int32_t>{});
  writer.number(int32_t{7});
  // Fixed little-endian, so that hosts agree: not merely whatever this one does.
  CHECK(writer.bytes().substr(5, 8) == std::string("\x08\x07\x06\x05\x04\x03\x02\x01"));
  ByteReader reader(writer.bytes());
  CHECK(reader.number<uint8_t>("a") == 200);
  CHECK(reader.number<int32_t>("b") == -5);
  CHECK(reader.number<uint64_t>("c") == 0x0102030405060708);
  CHECK(reader.number<double>("d") == -0.25);
  CHECK(reader.boolean("e"));
  CHECK(reader.utf8("f", 100) == "KV é");
  CHECK(reader.numbers<int32_t>("g", 3) == std::vector<int32_t>{1, -2, 3});
  CHECK(reader.numbers<int32_t>("h", 3).empty());
  CHECK(reader.number<int32_t>("i", 0, 7) == 7);
  CHECK(reader.finish().ok());
}

TEST_CASE("a ByteReader refuses what does not fit and names the field", "[disagg][control]") {
  auto error = [](const std::string& bytes, auto read) {
    ByteReader reader(bytes);
    read(reader);
    Status status = reader.finish();
    REQUIRE(!status.ok());
    return status.error().message;
  };
  auto count = [](uint32_t n, const std::string& rest) {
    ByteWriter writer;
    writer.number(n);
    return writer.take() + rest;
  };
  CHECK(error("abc", [](ByteReader& r) { CHECK(r.number<uint32_t>("x") == 0); }) == "x: needs 4 bytes, 3 are left");
  CHECK(error("", [](ByteReader& r) { r.number<uint8_t>("x"); }) == "x: needs 1 bytes, 0 are left");
  CHECK(error("\2", [](ByteReader& r) { CHECK(!r.boolean("flag")); }).find("flag: 2") == 0);
  CHECK(error("\x09", [](ByteReader& r) { r.number<uint8_t>("role", 0, 8); }) == "role: 9, expected from 0 to 8");
  // The largest count there is, with four bytes behind it: nothing is allocated for it.
  CHECK(error(count(0xffffffff, "abcd"), [](ByteReader& r) {
          CHECK(r.numbers<int64_t>("ids", 0xffffffff).capacity() == 0);
        }) == "ids: 4294967295 elements in 4 bytes");
  CHECK(error(count(2, "abcdefg"), [](ByteReader& r) { r.numbers<int32_t>("ids", 9); }) ==
        "ids: 2 elements in 7 bytes");
  CHECK(error(count(3, "abc"), [](ByteReader& r) { r.text("name", 2); }) == "name: 3 elements, at most 2 are expected");
  CHECK(error(count(2, "\xc3\x28"), [](ByteReader& r) { CHECK(r.utf8("name", 9).empty()); }) == "name: not UTF-8");
  CHECK(error("ab", [](ByteReader& r) { r.number<uint8_t>("x"); }) == "message: 1 bytes too many");
  // The first error stays, and reads after it give zeros.
  CHECK(error(std::string(1, 5), [](ByteReader& r) {
          r.boolean("first");
          CHECK(r.number<uint64_t>("second") == 0);
          CHECK(r.text("third", 10).empty());
        }).find("first: ") == 0);
  float nan = std::numeric_limits<float>::quiet_NaN();
  ByteWriter writer;
  writer.number(nan);
  CHECK(error(writer.bytes(), [](ByteReader& r) { r.number<float>("p", 0.0f, 1.0f); }).find("p: ") == 0);
}

// RFC 4231, sections 4.2 to 4.8 (without 4.6, which truncates).
TEST_CASE("HMAC-SHA256 agrees with RFC 4231", "[disagg][control]") {
  struct Row {
    std::string key, data, digest;
  };
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  const Row rows[] = {
      {std::string(20, '\x0b'), "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(20, '\xaa'), std::string(50, '\xdd'),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting, std::string(50, '\xcd'), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {std::string(131, '\xaa'),
       "This is a test using a larger than block-size key and a larger than block-size data. The "
       "key needs to be hashed before being used by the HMAC algorithm.",
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const Row& row : rows) {
    Sha256 digest = hmac_sha256(row.key, row.data);
    CHECK(hex(digest) == row.digest);
    Sha256 other = digest;
    CHECK(equal_in_constant_time(digest, other));
    other[31] ^= 1;
    CHECK(!equal_in_constant_time(digest, other));
  }
}

TEST_CASE("a cluster key comes from a file that others cannot read", "[disagg][control]") {
  TempDir dir;
  const std::string path = dir.path + "/key", good = "0123456789abcdef";
  auto write = [&](const std::string& text, mode_t mode) {
    std::ofstream(path, std::ios::binary) << text;
    REQUIRE(chmod(path.c_str(), mode) == 0);
  };
  auto error = [&] {
    auto key = ClusterKey::from_file(path);
    REQUIRE(!key.ok());
    CHECK(key.error().message.find(path) != std::string::npos);
    return key.error().message;
  };
  CHECK(error().find("No such file") != std::string::npos);
  write(good + "\r\n\n", 0600);
  auto key = ClusterKey::from_file(path);
  REQUIRE(key.ok());
  CHECK(key.value().bytes() == good);  // an editor's line end is not part of it
  CHECK(key.value().secret());
  write(good, 0640);
  CHECK(ClusterKey::from_file(path).ok());
  for (mode_t mode : {0644, 0604, 0602, 0620}) {
    write(good, mode);
    CHECK(error().find("mode") != std::string::npos);
  }
  write(good.substr(1) + "\n", 0600);
  CHECK(error().find("15 bytes; expected at least 16") != std::string::npos);
  write(std::string(4097, 'k'), 0600);
  CHECK(error().find("more than 4096") != std::string::npos);
  REQUIRE(remove(path.c_str()) == 0);
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  CHECK(error().find("not a regular file") != std::string::npos);
  CHECK(ClusterKey::random().bytes() != ClusterKey::random().bytes());
  CHECK(!ClusterKey().secret());
}

}  // namespace
}  // namespace xpyd::testing::control_bytes_test
