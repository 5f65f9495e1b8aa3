# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

set(PACKAGE_VERSION "2.13.0")
set(PACKAGE_VERSION_COMPATIBLE TRUE)
