# The version is that of attn_ops/version.py.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../../../version.py" _attn_ops_line REGEX "^__version__ = ")
string(REGEX REPLACE ".*\"([^\"]*)\".*" "\\1" PACKAGE_VERSION "${_attn_ops_line}")
unset(_attn_ops_line)

if(PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()
