# find_package(attn_ops): the header-only C++ API as the target attn_ops::attn_ops, which links libtorch.
#
#   cmake -DCMAKE_PREFIX_PATH="$(python -m attn_ops.cpp --cmake-prefix)" ...

include(CMakeFindDependencyMacro)
find_dependency(Torch)

if(NOT TARGET attn_ops::attn_ops)
  get_filename_component(_attn_ops_include "${CMAKE_CURRENT_LIST_DIR}/../../../include" ABSOLUTE)
  add_library(attn_ops::attn_ops INTERFACE IMPORTED)
  set_target_properties(
    attn_ops::attn_ops
    PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_attn_ops_include}" INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES}"
               INTERFACE_COMPILE_FEATURES cxx_std_20)
  unset(_attn_ops_include)
endif()
