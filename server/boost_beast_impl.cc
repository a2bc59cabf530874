// Beast's one translation unit (BOOST_BEAST_SEPARATE_COMPILATION).
//
// Beast 1.74's chunk parser asserts that at least five bytes are there when the last chunk's header
// is seen for the second time. A body of "0\r\n\r\n" that arrives byte by byte has four: the parser
// handles it, the assertion would end the server. So its assertions are off here, in this file
// only.
#define BOOST_ASIO_DISABLE_FENCED_BLOCK  // see boost_asio_impl.cc
#define BOOST_DISABLE_ASSERTS
#include <boost/beast/src.hpp>
