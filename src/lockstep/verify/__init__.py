"""Run a script in several ways, all of which must give the same bits, and find where one does not."""

from lockstep.verify.causes import CURES as CURES, Cause as Cause
from lockstep.verify.comparison import Difference as Difference
from lockstep.verify.driver import Report as Report, Row as Row, check_arguments as check_arguments, verify as verify
from lockstep.verify.ways import REFERENCE as REFERENCE, WAYS as WAYS, Way as Way, chosen as chosen
