// Asio's one translation unit (BOOST_ASIO_SEPARATE_COMPILATION): seven seconds of compiling, done
// once.
//
// Asio's fences around handlers are for threads that share data without locks. Ours hand work to
// the one I/O thread through the scheduler's mutex, and GCC's ThreadSanitizer knows no fences.
// Every file that includes a Boost header defines this first, so that all agree.
#define BOOST_ASIO_DISABLE_FENCED_BLOCK
#include <boost/asio/impl/src.hpp>
