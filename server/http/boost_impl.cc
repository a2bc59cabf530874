// The one translation unit of Asio and Beast (BOOST_ASIO_ and BOOST_BEAST_SEPARATE_COMPILATION): many
// seconds of compiling, done once.
//
// Asio's fences around handlers are for threads that share data without locks. Ours hand work to
// the one I/O thread through the scheduler's mutex, and GCC's ThreadSanitizer knows no fences.
// Every file that includes a Boost header defines this first, so that all agree.
#define BOOST_ASIO_DISABLE_FENCED_BLOCK
#include <boost/asio/impl/src.hpp>
#include <boost/asio/ssl/impl/src.hpp>

// Beast 1.74's chunk parser asserts that at least five bytes are there when the last chunk's header is seen for the
// second time. A body of "0\r\n\r\n" that arrives byte by byte has four: the parser handles it, the assertion would end
// the server. So its assertions are off from here on, in this file only.
#define BOOST_DISABLE_ASSERTS
#include <boost/assert.hpp>
#include <boost/beast/src.hpp>
