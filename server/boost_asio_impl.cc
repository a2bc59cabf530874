// Asio's one translation unit (BOOST_ASIO_SEPARATE_COMPILATION): seven seconds of compiling, done
// once.
#include <boost/asio/impl/src.hpp>
