// The only file that compiles the sources of Asio and Beast (BOOST_ASIO_ and BOOST_BEAST_SEPARATE_COMPILATION). They
// take many seconds.
//
// Asio's fences around handlers serve threads that share data without locks. Here all work reaches the one I/O thread
// through the scheduler's mutex, and GCC's ThreadSanitizer does not understand fences. Every file that includes a Boost
// header defines this macro first, so that all agree.
#define BOOST_ASIO_DISABLE_FENCED_BLOCK
#include <boost/asio/impl/src.hpp>

// Beast 1.74's chunk parser asserts that at least five bytes are present when it sees the last chunk's header for the
// second time. A body "0\r\n\r\n" that arrives byte by byte has four. The parser handles it, but the assertion would
// abort the server. So Beast's assertions are off from here on, in this file only.
#define BOOST_DISABLE_ASSERTS
#include <boost/assert.hpp>
#include <boost/beast/src.hpp>
