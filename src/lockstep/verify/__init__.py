"""Run a script in several ways, all of which must give the same bits, and find where one does not."""

from lockstep.verify.causes import CURES as CURES
from lockstep.verify.driver import Report as Report, Row as Row, check_arguments as check_arguments, verify as verify
from lockstep.verify.ways import WAYS as WAYS, chosen as chosen
